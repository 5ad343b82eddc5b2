// PyTorch's process-wide settings on which results depend, encoded as bytes to compare and restore.
#pragma once

#include <string>

namespace gpipe_fast {

// Returns the settings that decide which operators are called while layers are traced: the enabled attention kernels
// and their priority, whether cuDNN is enabled (batch norm queries it), and whether attention in 16-bit dtypes may
// accumulate in 16 bits.
std::string operator_settings();
// Restores the result of an earlier operator_settings(), for the whole process.
void restore_operator_settings(const std::string& choices);

// Returns the settings that decide how operators compute when they run. A captured graph keeps the settings of its
// capture.
std::string numeric_settings();
// Returns operator_settings() followed by numeric_settings().
std::string all_settings();

}  // namespace gpipe_fast
