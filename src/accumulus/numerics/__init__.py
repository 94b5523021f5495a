"""What low precision does to a model's numbers. `diagnosis` puts it together; read that first."""
