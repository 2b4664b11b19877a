"""Images in, detections out: the predictor, what it writes, and how it is drawn."""
