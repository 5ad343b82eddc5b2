// Cubins: ELF files with compiled kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace fake_cuda {

// A parameter's place in the buffer of a launch's arguments, in bytes.
struct Parameter {
  uint16_t offset, size;
};

struct CubinKernel {
  std::vector<Parameter> parameters;
  uint32_t block_threads = 0;  // number of threads that every block must have; 0 for any
};

// A copy of a cubin.
class Cubin {
 public:
  // Copies an image, whose size is found in its headers. Returns nothing if it is not a cubin.
  static std::optional<Cubin> read(const void* image);

  const std::string& bytes() const { return bytes_; }
  // Returns the compute capability that the code needs: 90 for 9.0.
  unsigned capability() const;
  const std::map<std::string, CubinKernel>& kernels() const { return kernels_; }

 private:
  void find_kernels();

  std::string bytes_;
  std::map<std::string, CubinKernel> kernels_;
};

}  // namespace fake_cuda
