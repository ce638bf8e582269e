"""Files, fingerprints, and what is kept between runs."""
