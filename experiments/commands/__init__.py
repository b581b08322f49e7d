"""Everything that knows flags: train.py's and those of python -m experiments."""
