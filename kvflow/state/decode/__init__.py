"""The state machine of a decode rank. Pure."""
