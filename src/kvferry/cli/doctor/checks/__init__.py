"""What ``kvferry doctor`` looks at: one module for each area, one value for each finding."""
