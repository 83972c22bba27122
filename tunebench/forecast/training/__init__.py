"""How the shipped model is made from measurements, and how wrong it is.

Run it as `python -m tunebench.forecast.training`, or by the session `train-predictor`.
Needs scikit-learn (the extra `train`); what it makes does not.
"""
