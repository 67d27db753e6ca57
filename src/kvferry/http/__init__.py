"""What every HTTP server of ours has around its application: bounds on who may hold what."""
