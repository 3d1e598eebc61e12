"""Print which decode attention each method gets on each chip."""

from kvqjax.pallas_kernels.support import main

if __name__ == "__main__":
    main()
