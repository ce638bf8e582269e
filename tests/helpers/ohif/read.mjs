// A series, its Parametric Map and its Segmentation, read by OHIF's loader and adapters: the same in Node and a browser.
import { data } from 'dcmjs';
import { adaptersPMAP, adaptersSEG } from '@cornerstonejs/adapters';
import { metaData, utilities } from '@cornerstonejs/core';
import { wadouri } from '@cornerstonejs/dicom-image-loader';

/** Slices are pairs of a name and bytes. Voxels are in the order of OHIF's volume, columns first. */
export async function read(slices, map, segmentation) {
  for (const [name, bytes] of slices) {
    await wadouri.dataSetCacheManager.load(name, async () => bytes);
  }
  const ids = slices.map(([name]) => `dicomfile:${name}`);
  const volume = utilities.generateVolumePropsFromImageIds(ids, 'scan');
  const { ParametricMap, Segmentation } = { ...adaptersPMAP.Cornerstone3D, ...adaptersSEG.Cornerstone3D };
  const { pixelData } = await ParametricMap.generateToolState(volume.imageIds, map, metaData);
  const { labelMapImages, segMetadata } = await Segmentation.createFromDICOMSegBuffer(volume.imageIds, segmentation, {
    metadataProvider: metaData,
  });
  const { dict } = data.DicomMessage.readFile(map);
  const [{ SeriesInstanceUID, ReferencedInstanceSequence }] =
    data.DicomMetaDictionary.naturalizeDataset(dict).ReferencedSeriesSequence;
  return {
    dimensions: volume.dimensions,
    spacing: volume.spacing,
    origin: volume.origin,
    direction: volume.direction,
    imageIds: volume.imageIds,
    map: pixelData,
    segmentation: labelMapImages[0].map(image => Array.from(image.voxelManager.getScalarData())).flat(),
    label: segMetadata.data[1].SegmentLabel,
    series: SeriesInstanceUID,
    instances: ReferencedInstanceSequence.map(each => each.ReferencedSOPInstanceUID),
  };
}
