"""The bench lab: what the machine gives, what octavo makes of it, and reports that compare committed results."""
