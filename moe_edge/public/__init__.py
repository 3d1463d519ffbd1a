"""What `import moe_edge` offers: models, engines and their outputs."""
