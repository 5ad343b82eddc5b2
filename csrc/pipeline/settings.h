// PyTorch's process-wide settings on which results depend, as bytes that are only compared.
#pragma once

#include <string>

namespace gpipe_fast {

// What decides, while layers are traced, which operators are called: the kernels that attention may choose from, in
// their order; whether cuDNN may be used, which batch norm asks; whether attention in 16 bits may sum in 16 bits.
std::string choices_now();
// Sets them for the whole process, as they once were.
void choose(const std::string& choices);

// What decides while operators run how they compute. What was captured under others computes as those say.
std::string numerics_now();
// Both.
std::string settings_now();

}  // namespace gpipe_fast
