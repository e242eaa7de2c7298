"""Training of GPTs at long sequence lengths: models, data, memory and the loop around them."""
