"""What decides the next step's ratio, and whether compression goes on."""
