"""What slow, silent and abusive connections cost the others, and the API process."""
