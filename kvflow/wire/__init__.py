"""What peers say to each other: `messages`, their bytes (`codec`), and `ticket`. Pure."""
