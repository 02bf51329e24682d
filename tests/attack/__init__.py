"""What somebody on the network can do, and what he cannot."""
