"""What travels between processes: `messages` (pure), `codec` (bytes), `channel` (sockets)."""
