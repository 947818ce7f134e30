"""Conversion of weights from and to Hugging Face's format, and from t5x's."""
