// The context of a device, which a library such as cuBLAS expects to be current in a thread that calls it.
#pragma once

#include <c10/core/Device.h>

namespace gpipe_fast {

// Makes the context of a device current in the calling thread, in which the device is current.
using ContextSetter = void (*)(at::Device device);
// Registers the function for CUDA devices. Called while libraries are loaded.
bool register_context_setter(ContextSetter set);

}  // namespace gpipe_fast
