// PyTorch's process-wide settings on which results depend, encoded as bytes to compare and restore.
#pragma once

#include <string>

namespace gpipe_fast {

// Returns the settings that decide which operators are called while layers are traced: the enabled attention kernels
// and their priority, whether cuDNN is enabled (batch norm queries it), and whether attention in 16-bit dtypes may
// accumulate in 16 bits.
std::string choices_now();
// Restores the result of an earlier choices_now(), for the whole process.
void choose(const std::string& choices);

// Returns the settings that decide how operators compute when they run. A captured graph keeps those of its capture.
std::string numerics_now();
// Returns choices_now() followed by numerics_now().
std::string settings_now();

}  // namespace gpipe_fast
