"""Predicted time of training steps on several GPUs."""
