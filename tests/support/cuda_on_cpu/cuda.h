// The generated CUDA C includes the driver's header and uses nothing of it.
#pragma once
