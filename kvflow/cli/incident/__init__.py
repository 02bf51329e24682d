"""`kvflow incident`: reads what ranks have kept about an incident, and says what happened."""
