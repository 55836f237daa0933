"""What a Monitor's records hold of the model itself: its activations and its parameters."""
