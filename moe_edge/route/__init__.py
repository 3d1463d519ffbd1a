"""Route policies: which experts a token really uses, given what is resident."""
