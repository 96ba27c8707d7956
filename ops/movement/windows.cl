// Windows over images, for convolutions and pooling; included by files of kernels.

// Spatial sizes of source, target and kernel, strides, dilations (far) and pads, each (D, H, W).
#define WINDOW_SIZES                                                                           \
  int sd, int sh, int sw, int td, int th, int tw, int kd, int kh, int kw, int step_d,          \
      int step_h, int step_w, int far_d, int far_h, int far_w, int pad_d, int pad_h, int pad_w

// The output pixel (pd, ph, pw) of this work-item, and its channel counted over all images.
#define OUTPUT_PIXEL                                                                  \
  int id = get_global_id(0);                                                          \
  if (id >= count) return;                                                            \
  int pw = id % tw, ph = id / tw % th, pd = id / tw / th % td, channel = id / tw / th / td
