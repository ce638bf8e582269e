"""Files, fingerprints, caches, and the tables and scores that are kept between runs."""
