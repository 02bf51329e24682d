"""What a decode rank decides. Pure."""
