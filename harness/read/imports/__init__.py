"""Records of other tools, made into ours."""
