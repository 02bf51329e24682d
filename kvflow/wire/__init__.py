"""Communication between processes: `messages` (pure), `codec` (bytes), `channel` (sockets)."""
