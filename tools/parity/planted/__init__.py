"""Defects that are planted in the code to see whether parity, or the tests, notice them."""
