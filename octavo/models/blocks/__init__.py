"""What a model is made of: a torch-free spec for each kind of block, which builds the live one."""
