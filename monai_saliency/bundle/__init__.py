"""Other people's bundles, and the settings of our own."""
