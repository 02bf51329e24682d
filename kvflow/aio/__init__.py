"""Small tools for the event loop that anyio does not have."""
