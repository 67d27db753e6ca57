"""The checks of ``kvferry doctor``: one module for each area, one value for each finding."""
