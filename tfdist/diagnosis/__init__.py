"""What tfdist.doctor looks at."""
