"""The detectors: backbone, encoder, query selection, decoder; a variant is a function with the numbers that differ."""
