"""How families of models write calls of tools: a file a family, behind one base."""
