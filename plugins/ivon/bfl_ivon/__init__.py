"""IVON: Gaussian posteriors at the price of Adam, a plugin of bflcore."""
