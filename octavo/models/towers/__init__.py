"""Towers: encoders of pictures, as models for pictures and texts have them."""
