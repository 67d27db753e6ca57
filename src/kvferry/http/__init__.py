"""HTTP servers of ours: what each has around its application, bounds on who may hold what."""
