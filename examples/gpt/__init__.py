"""What train_gpt.py is made of: models, data, one training run, and the comparison of several."""
