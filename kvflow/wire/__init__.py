"""What peers say to each other: `messages`, `codec` (bytes), `ticket`, and `weight` of what is decoded. Pure."""
