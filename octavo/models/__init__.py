"""Models: specs of model folders, their download and loading, and the decoder."""
