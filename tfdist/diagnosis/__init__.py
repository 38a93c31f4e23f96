"""The checks of tfdist.doctor."""
