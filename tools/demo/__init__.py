"""The parts of train_demo.py: how the bundled model is made."""
