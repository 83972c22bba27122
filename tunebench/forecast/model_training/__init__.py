"""Training of the bundled model of library kernels, and its error on devices left out.

Run it as `python -m tunebench.forecast.model_training` or by the nox session `train-predictor`. It needs
scikit-learn (extra `train`); predictions do not.
"""
