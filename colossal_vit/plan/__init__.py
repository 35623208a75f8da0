"""An optimizer step without data, tensors and the other ranks."""
