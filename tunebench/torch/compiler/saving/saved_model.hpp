// A saved model of tunebench in C++: AOTInductor's package, whose calls of kernels run shared objects.
//
//     tunebench::SavedModel model("folder");  // where the file was unzipped
//     model.load_weights(weights);            // by name, as in the module's state_dict
//     std::vector<at::Tensor> results = model.run({x});
//
// Include it in one source file of a program, since it registers an operator; link with libtorch and libdl. The
// machine code of the folder runs, for the processor and the sizes it was saved for: neither is checked here.
#pragma once

#include <dlfcn.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/library.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tunebench {

// -- threads -----------------------------------------------------------------------------------------------

namespace threads {

using Function = void (*)(char**, std::size_t*, std::size_t*, void*);

// Run a function on all pieces of work, by torch's threads; arrays advance by `steps` for each piece.
inline void parallel_for(void* function, char** arrays, std::size_t* sizes, std::size_t* steps, void* data,
                         std::size_t inner, std::size_t count, std::int64_t) {
    const auto run = reinterpret_cast<Function>(function);
    at::parallel_for(0, static_cast<std::int64_t>(sizes[0]), 1, [&](std::int64_t begin, std::int64_t end) {
        std::vector<char*> shifted(count);
        for (std::size_t i = 0; i < count; ++i) shifted[i] = arrays[i] + begin * steps[i];
        std::vector<std::size_t> shape(sizes, sizes + inner + 1);
        shape[0] = end - begin;
        run(shifted.data(), shape.data(), steps, data);
    });
}

// Divide the first dimension into `pieces`; a piece has first and last index of each dimension.
inline void schedule(std::uint64_t rank, const std::int64_t* first, const std::int64_t* last,
                     std::uint64_t pieces, std::int64_t* pieces_out, std::int64_t) {
    const std::int64_t total = last[0] - first[0] + 1;
    for (std::uint64_t i = 0; i < pieces; ++i, pieces_out += 2 * rank) {
        const auto begin = first[0] + total * static_cast<std::int64_t>(i) / static_cast<std::int64_t>(pieces);
        const auto end = first[0] + total * static_cast<std::int64_t>(i + 1) / static_cast<std::int64_t>(pieces);
        for (std::uint64_t dim = 0; dim < rank; ++dim) {
            pieces_out[dim] = begin == end ? 1 : dim == 0 ? begin : first[dim];
            pieces_out[rank + dim] = begin == end ? 0 : dim == 0 ? end - 1 : last[dim];
        }
    }
}

inline void* allocate(std::int64_t words) { return std::calloc(words, sizeof(std::int64_t)); }
inline std::int64_t count() { return at::get_num_threads(); }
inline std::int64_t index() { return at::get_thread_num(); }
inline std::int64_t set_chunk(std::int64_t) { return 0; }
inline std::int64_t chunk() { return 0; }
inline std::int64_t piece_count(std::int64_t threads, std::int64_t, void*, void*) { return threads; }

// Functions that kernels call, in the order of `tunebench_bind`.
inline void* const table[] = {
    reinterpret_cast<void*>(parallel_for), reinterpret_cast<void*>(schedule), reinterpret_cast<void*>(schedule),
    reinterpret_cast<void*>(allocate),     reinterpret_cast<void*>(std::free), reinterpret_cast<void*>(count),
    reinterpret_cast<void*>(index),        reinterpret_cast<void*>(set_chunk), reinterpret_cast<void*>(chunk),
    reinterpret_cast<void*>(piece_count),
};

}  // namespace threads

// -- kernels -----------------------------------------------------------------------------------------------

inline at::ScalarType dtype_of(const std::string& name) {
    static const std::map<std::string, at::ScalarType> types = {
        {"float32", at::kFloat}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16}, {"float64", at::kDouble},
        {"bool", at::kBool},     {"int8", at::kChar},    {"uint8", at::kByte},        {"int16", at::kShort},
        {"int32", at::kInt},     {"int64", at::kLong},   {"float8_e4m3fn", at::kFloat8_e4m3fn}};
    const auto found = types.find(name);
    TORCH_CHECK(found != types.end(), "tunebench: unknown type ", name);
    return found->second;
}

struct TensorLayout {
    std::vector<std::int64_t> shape, strides;
    at::ScalarType dtype = at::kFloat;

    at::Tensor empty() const { return at::empty_strided(shape, strides, at::TensorOptions(dtype)); }
    at::Tensor read(const at::Tensor& tensor) const {
        const bool fits = tensor.scalar_type() == dtype && tensor.strides() == at::IntArrayRef(strides);
        return fits ? tensor : empty().copy_(tensor);
    }
};

// Layouts of inputs and outputs: [[[[sizes], [strides], "type", extent], ...], [...]].
class LayoutReader {
   public:
    explicit LayoutReader(std::string_view text) : text_(text) {}

    std::vector<std::vector<TensorLayout>> read() {
        std::vector<std::vector<TensorLayout>> parts;
        expect('[');
        while (next() == '[') parts.push_back(tensors());
        return parts;
    }

   private:
    char next() const {
        TORCH_CHECK(at_ < text_.size(), "tunebench: layouts end early: ", std::string(text_));
        return text_[at_];
    }
    void expect(char wanted) {
        TORCH_CHECK(next() == wanted, "tunebench: malformed layouts: ", std::string(text_));
        ++at_;
    }
    void end() {
        expect(']');
        if (at_ < text_.size() && text_[at_] == ',') ++at_;
    }
    std::int64_t number() {
        const auto stop = text_.find_first_of(",]", at_);
        const auto value = std::stoll(std::string(text_.substr(at_, stop - at_)));
        at_ = stop;
        if (next() == ',') ++at_;
        return value;
    }
    std::vector<std::int64_t> numbers() {
        std::vector<std::int64_t> values;
        expect('[');
        while (next() != ']') values.push_back(number());
        end();
        return values;
    }
    std::vector<TensorLayout> tensors() {
        std::vector<TensorLayout> layouts;
        expect('[');
        while (next() != ']') {
            TensorLayout layout;
            expect('[');
            layout.shape = numbers();
            layout.strides = numbers();
            expect('"');
            const auto stop = text_.find('"', at_);
            layout.dtype = dtype_of(std::string(text_.substr(at_, stop - at_)));
            at_ = stop + 1;
            expect(',');
            number();
            end();
            layouts.push_back(std::move(layout));
        }
        end();
        return layouts;
    }

    std::string_view text_;
    std::size_t at_ = 0;
};

// A shared object and how it is called: `t` tensor, `n` number of a tensor, `i` integer, `f` float, `s` scratch.
struct Kernel {
    std::vector<std::int64_t> constants;
    std::vector<std::pair<char, std::string>> arguments;
    int (*function)(const void*, const void*) = nullptr;

    void operator()(const std::vector<at::Tensor>& tensors) const {
        std::vector<std::int64_t> values;
        std::vector<at::Tensor> scratch;
        const auto add = [&values](double number) {
            std::int64_t bits;
            std::memcpy(&bits, &number, sizeof bits);
            values.push_back(bits);
        };
        for (const auto& [kind, text] : arguments) {
            if (kind == 't') values.push_back(reinterpret_cast<std::int64_t>(tensors.at(std::stoul(text)).data_ptr()));
            if (kind == 'n') add(tensors.at(std::stoul(text)).item().toDouble());
            if (kind == 'i') values.push_back(std::stoll(text));
            if (kind == 'f') add(std::stod(text));
            if (kind == 's') {
                scratch.push_back(at::empty({std::stoll(text)}, at::TensorOptions(at::kByte)));
                values.push_back(reinterpret_cast<std::int64_t>(scratch.back().data_ptr()));
            }
        }
        TORCH_CHECK(function(constants.data(), values.data()) == 0, "tunebench: memory is short in a kernel");
    }
};

inline std::unordered_map<std::string, Kernel>& kernels() {
    static std::unordered_map<std::string, Kernel> loaded;
    return loaded;
}

inline std::vector<at::Tensor> saved_kernel(at::TensorList inputs, std::string_view name, std::string_view layouts) {
    const auto kernel = kernels().find(std::string(name));
    TORCH_CHECK(kernel != kernels().end(), "tunebench: kernel ", std::string(name), " is not loaded");
    const auto parts = LayoutReader(layouts).read();
    std::vector<at::Tensor> tensors, outputs;
    for (std::size_t i = 0; i < inputs.size(); ++i) tensors.push_back(parts.at(0).at(i).read(inputs[i]));
    for (const auto& layout : parts.at(1)) outputs.push_back(layout.empty());
    tensors.insert(tensors.end(), outputs.begin(), outputs.end());
    kernel->second(tensors);
    return outputs;
}

// -- models ------------------------------------------------------------------------------------------------

class SavedModel {
   public:
    // `folder` has the members of the file. A shared object stays loaded until the program ends.
    explicit SavedModel(const std::string& folder) : folder_(folder) {
        std::ifstream lines(folder + "/cpp.txt");
        TORCH_CHECK(lines.good(), "tunebench: ", folder, " has no cpp.txt: unzip a saved model there");
        std::string kind, name;
        while (lines >> kind >> name) kind == "kernel" ? read_kernel(lines, name) : read_constant(lines, name);
        loader_ = std::make_unique<torch::inductor::AOTIModelPackageLoader>(folder + "/model.pt2");
    }

    // Use weights by name; the model reads them where they are.
    void load_weights(const std::unordered_map<std::string, at::Tensor>& weights) {
        std::unordered_map<std::string, at::Tensor> used = constants_;
        for (const auto& name : loader_->get_constant_fqns()) {
            if (used.count(name)) continue;
            const auto weight = weights.find(name);
            TORCH_CHECK(weight != weights.end(), "tunebench: weight ", name, " is missing");
            used[name] = weight->second;
        }
        used_ = used;
        loader_->load_constants(used_, false, true, true);
    }

    std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) {
        c10::InferenceMode inference;
        return loader_->run(inputs);
    }

   private:
    static std::vector<std::int64_t> read_numbers(std::istream& lines) {
        std::size_t count = 0;
        lines >> count;
        std::vector<std::int64_t> values(count);
        for (auto& value : values) lines >> value;
        return values;
    }

    void read_kernel(std::istream& lines, const std::string& name) {
        Kernel kernel;
        kernel.constants = read_numbers(lines);
        std::size_t count = 0;
        lines >> count;
        for (std::string argument; count > 0; --count) {
            lines >> argument;
            kernel.arguments.emplace_back(argument[0], argument.substr(1));
        }
        void* library = dlopen((folder_ + "/shared/" + name).c_str(), RTLD_NOW | RTLD_LOCAL);
        TORCH_CHECK(library != nullptr, "tunebench: ", dlerror());
        reinterpret_cast<void (*)(void* const*)>(dlsym(library, "tunebench_bind"))(threads::table);
        kernel.function = reinterpret_cast<int (*)(const void*, const void*)>(dlsym(library, "tunebench_run"));
        kernels()[name] = kernel;
    }

    void read_constant(std::istream& lines, const std::string& name) {
        std::string dtype;
        lines >> dtype;
        TensorLayout layout;
        layout.dtype = dtype_of(dtype);
        layout.shape = read_numbers(lines);
        layout.strides = read_numbers(lines);
        const at::Tensor contiguous = at::empty(layout.shape, at::TensorOptions(layout.dtype));
        std::ifstream content(folder_ + "/constants/" + name, std::ios::binary);
        content.read(static_cast<char*>(contiguous.data_ptr()), static_cast<std::streamsize>(contiguous.nbytes()));
        TORCH_CHECK(content.good(), "tunebench: constant ", name, " cannot be read");
        constants_[name] = layout.empty().copy_(contiguous);
    }

    std::string folder_;
    std::unordered_map<std::string, at::Tensor> constants_, used_;
    std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader_;
};

}  // namespace tunebench

TORCH_LIBRARY(tunebench, library) {
    library.def("saved_kernel(Tensor[] inputs, str kernel, str layouts) -> Tensor[]");
    library.impl("saved_kernel", c10::DispatchKey::CPU, TORCH_FN(tunebench::saved_kernel));
}
