"""What a user can measure of their own fabric: kvflow next to the transport that it uses, in turn."""
