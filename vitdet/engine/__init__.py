"""Training: it receives built objects and knows no model, data set or loss by name."""
