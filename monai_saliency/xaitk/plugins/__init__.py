"""The classes that xaitk-saliency finds when this package is installed: its own methods, run by monai_saliency.

Each has the name, the parameters and the configuration of xaitk-saliency's class of that name, and gives the same maps.
A user of xaitk-saliency changes the import and nothing else::

    from monai_saliency.xaitk.plugins.gen_image_classifier_blackbox_sal import RISEStack

- ``perturb_image``: ``RISEGrid``, ``MCRISEGrid``, ``RandomGrid``, ``SlidingRadial``, ``SlidingWindow``;
- ``gen_classifier_conf_sal``: ``RISEScoring``, ``MCRISEScoring``, ``OcclusionScoring``, ``SquaredDifferenceScoring``;
- ``gen_descriptor_sim_sal``: ``SimilarityScoring``;
- ``gen_detector_prop_sal``: ``DRISEScoring``;
- ``gen_image_classifier_blackbox_sal``: ``PerturbationOcclusion``, ``RISEStack``, ``MCRISEStack``,
  ``SlidingWindowStack``;
- ``gen_object_detector_blackbox_sal``: ``PerturbationOcclusion``, ``DRISEStack``, ``RandomGridStack``;
- ``gen_image_similarity_blackbox_sal``: ``PerturbationOcclusion``, ``SBSMStack``;
- ``base``: what they have in common.
"""
