"""The systems compared, one file each."""
